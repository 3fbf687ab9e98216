"""What a parameter of any part may be."""


def is_number(value: object) -> bool:
    """Whether it is one that a parameter may be; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_switches(**switches: bool) -> None:
    """Refuses what is neither True nor False: "no" would count as True.

    Raises:
        TypeError: Naming the first such switch.
    """
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{name} must be True or False; got {switch!r}. Leave it out for its default.")
