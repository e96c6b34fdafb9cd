"""How numbers are written in sentences, tables and drawings. Shares are written with Python's own format: 73.4%."""


def signed(value: float, form: str = ".4f") -> str:
    """With + or −; what is shown as zero has no sign."""
    shown = f"{abs(value):{form}}"
    return shown if float(shown) == 0 else f"{'−' if value < 0 else '+'}{shown}"


def plus_minus(error: float | None) -> str:
    """A standard error after its value; nothing where there is none."""
    return "" if error is None else f" ± {error:.4f}"
