#!/opt/teneral/bin/python
"""pip for the image's packages: that of the base image, run for `/opt/teneral`.

The image has it as `pip` and as the module `pip`; a pip of its own there would take 14 MB. `pip install --upgrade pip`
replaces both.
"""

import os
import sys

if __name__ == "__main__":
    base = os.path.join(sys.base_prefix, "bin", "python3")
    os.execv(base, [base, "-m", "pip", "--python", sys.executable, *sys.argv[1:]])  # noqa: S606 - no shell is wanted
