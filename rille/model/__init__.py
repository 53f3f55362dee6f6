"""What K3 is, on one device."""
