"""Other ways to bring weights from one process to several, each as well done as we can, one in each file."""
