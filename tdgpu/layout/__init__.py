"""What a save is: its levels, leaves and files, read without touching a device."""
