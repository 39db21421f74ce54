"""Tells how deeply JSON values are nested."""


def is_deeper(value: object, levels: int) -> bool:
    """Return True if there is an object or a list below so many levels of them."""
    level = [value]
    for _ in range(levels):
        deeper: list[object] = []
        for container in level:
            if isinstance(container, dict):
                deeper += container.values()
            elif isinstance(container, list):
                deeper += container
        level = deeper
    return any(isinstance(item, dict | list) for item in level)
