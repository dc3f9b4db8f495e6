"""One host per kind of process: builds its part from the run's spec. Hosts know nothing of Ray; heavy imports happen in
`start`, so that a process imports what its part needs and no more."""
