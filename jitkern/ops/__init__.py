"""The ops, one public one a module: check, choose the variant, make outputs, launch."""
