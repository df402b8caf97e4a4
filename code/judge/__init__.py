"""The judge of what a reader wrote from memory; code/practice.py is its command line."""
