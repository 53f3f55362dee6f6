"""Succeed if this interpreter imports a torch that is new enough for Rille (`dependencies` in pyproject.toml)."""

import sys

OLDEST = (2, 11)


def main() -> int:
    try:
        import torch
    except ImportError:
        return 1
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST:
        print(f"torch {torch.__version__} is here, but Rille needs {OLDEST[0]}.{OLDEST[1]} or newer")
        return 1
    print(f"torch {torch.__version__} is here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
