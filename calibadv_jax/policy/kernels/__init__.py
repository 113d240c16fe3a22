"""What stands in for the plain arithmetic: attention kernels, and products and functions as XLA computes them best."""
