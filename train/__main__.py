"""``python -m train``."""

import sys

try:
    from train.cli import main
except ModuleNotFoundError as error:
    sys.exit(f'error: train needs the package {error.name}: pip install -e ".[train]"')

sys.exit(main())
