"""``python -m tdgpu``."""

from tdgpu.cli import main

if __name__ == "__main__":
    main()
