"""What each rank does, as plain data: actions, and later orders, passes, check, simulation. No torch."""
