"""Sources, formats, packing and the resumable loader."""
