"""A judge of own tasks: started with the same file, it asks and scores them, and refuses nodes of another curriculum."""

import random
import time
from pathlib import Path

import httpx2
import pytest

from judge.app import create_app
from judge.config import JudgeSettings
from judge.service import open_service
from swarmd.tasks.own import find_curriculum
from tests.judge.conftest import Court
from tests.judge.peers import ORIGIN

pytestmark = [pytest.mark.anyio, pytest.mark.net]
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sums.py"


async def test_a_judge_of_own_tasks(tmp_path: Path) -> None:
    digest = find_curriculum(str(EXAMPLE)).digest
    async with open_service(JudgeSettings(tmp_path / "judge.sqlite3", str(EXAMPLE)), random.Random(3)) as service:
        transport = httpx2.ASGITransport(app=create_app(service), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url=ORIGIN) as http:
            court = Court(service, http, time.monotonic, time.time)  # type: ignore[arg-type] # real clocks
            peer = court.peer()
            asked = await court.post(peer, "/v1/evaluations", {"round": 1, "model": "tiny", "curriculum": digest})
            assert asked.status_code == 201, asked.text
            _, a, sign, b = asked.json()["question"].removesuffix(".").split()
            right = int(a) + int(sign + b)
            graded = await court.answer(peer, asked.json()["evaluation"], f"<answer>{right}</answer>")
            assert graded.json()["reward"] == 1.0, graded.text
            other = await court.ask(court.peer())
            assert other.status_code == 409 and "this judge asks sums" in other.text and "Own tasks need a judge" in other.text
