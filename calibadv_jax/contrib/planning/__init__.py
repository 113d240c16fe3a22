"""What a run costs on devices that are not attached."""
