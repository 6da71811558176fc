"""Rules that hold for every target device."""
