"""`teneral` with a GPU that is none: `--device cuda --backend direct` finds the driver and the kernels on the CPU.

    python -m tests.support.direct_server serve MODEL …

Before it ends it names the modules of torch, Triton and CuPy that it has imported on standard error.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from tests.support.direct_engine import OrderedDevice
from tests.support.direct_kernels import open_device

from teneral import cli
from teneral.runtime.backends.cuda.direct import device
from teneral.runtime.backends.cuda.direct.device import DirectDevice
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance import loading


@cache
def the_device() -> DirectDevice:
    """Computing and placing weights share it."""
    return open_device()


def main() -> int:
    changed: Any = ServeConfig
    changed.chosen_device = property(lambda config: "cpu" if config.device == "cpu" else "cuda:0")
    device.open_direct_device = lambda name, folders: the_device()
    loading.opener = lambda *_: lambda: OrderedDevice(the_device())  # type: ignore[assignment,return-value]
    status = cli.run(sys.argv[1:])
    found = sorted(name for name in ("torch", "triton", "cupy") if name in sys.modules)
    print(f"imported: {found}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
