"""`penstock quantize`: the weights of a checkpoint as 4 bits with scales and zeros, fitted to calibration text."""
