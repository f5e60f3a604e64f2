"""Other libraries' names and conventions on jitkern's kernels: a changed import line moves a caller over."""
