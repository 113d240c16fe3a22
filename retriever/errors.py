"""The service's own error type; it shares nothing with the trainer."""


class RetrieverError(Exception):
    """One line that names the file, option or value, and the way out."""
