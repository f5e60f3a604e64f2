"""GPU attention kernels with no build step."""
__version__ = "0.1.0"
