"""Format values of records alike in Markdown, on the console and in notebooks."""


def preview(text: str, length: int | None) -> str:
    """Return the first `length` characters and the number of omitted ones; None: all."""
    if length is None or len(text) <= length:
        return text
    return f"{text[:length]}\n[… {len(text) - length} more characters]"


def format_number(value: float | None) -> str:
    """Format a number with four significant digits; a dash for None and NaN."""
    return "–" if value is None or value != value else f"{value:.4g}"
