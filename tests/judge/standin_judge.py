"""A judge as a separate process that evaluates weights with standin_worker.py.

`python -m tests.judge.standin_judge FOLDER`.
"""

import asyncio
import sys
from pathlib import Path

from tests.judge.verified.test_upload import serving


async def main() -> None:
    async with serving(Path(sys.argv[1])) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
