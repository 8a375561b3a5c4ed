"""State behind an import: ``kinds.py`` gets at it as people do, by the module's name."""

COUNT = 0
ROWS: list[int] = []


def bump(rows: int) -> None:
    global COUNT
    COUNT += 1
    ROWS.append(rows)
