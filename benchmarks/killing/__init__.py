"""What `kills.py` is made of: runs that end before their time, and what must hold afterwards."""
