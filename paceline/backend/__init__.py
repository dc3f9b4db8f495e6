"""Train backends: forward, backward and step. They know nothing of replicas, queues or versions. Floor 3."""
