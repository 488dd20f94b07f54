"""Parts of on_accelerator.py, one file each, and how they measure."""
