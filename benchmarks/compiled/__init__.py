"""What compiled programs need, on devices that need not be here."""
