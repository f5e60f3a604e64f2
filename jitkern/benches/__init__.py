"""The comparisons that ``jitkern bench`` runs: this package beside the public kernels that are installed."""
