"""Development only: the demo model and the log of measurements."""
