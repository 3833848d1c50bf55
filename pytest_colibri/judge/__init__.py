"""Claims held against evidence."""
