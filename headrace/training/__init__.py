"""The loop, the loss, learning-rate schedules, metrics and progress."""
