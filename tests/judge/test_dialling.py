"""The judge dials the peers in its invitation; the page "Join" says whether any of them answers."""

from pathlib import Path

import pytest
import trio
from typer.testing import CliRunner

from judge.cli import app
from judge.errors import JudgeError
from p2p.identity import Identity
from p2p.peers.noise_probe import probe
from swarmd.config.invitation import Invitation, write_invitation
from tests.judge.conftest import eventually, open_court
from tests.p2p.real import real_engine
from tests.ports import kept_port

ME, OTHER = (Identity(bytes([n]) * 32).peer_id for n in (1, 2))


def inviting(*addresses: str, curriculum: str = "tiny-9") -> str:
    return write_invitation(Invitation("main", curriculum, "0123456789abcdef", "tiny", addresses))


@pytest.mark.net
def test_a_dial_succeeds_only_if_the_expected_peer_answers() -> None:
    async def all_of_them() -> list[tuple[bool, str]]:
        async with trio.open_nursery() as nursery:
            [listens] = await nursery.start(real_engine("libp2p", 1).run)
            place = listens.split("/p2p/")[0]
            deaf = await nursery.start(trio.serve_tcp, lambda stream: stream.aclose(), 0)
            stranger = f"/ip4/127.0.0.1/tcp/{deaf[0].socket.getsockname()[1]}"
            asked = [f"{place}/p2p/{ME}", f"{place}/p2p/{OTHER}", f"{stranger}/p2p/{ME}"]
            found = await probe(asked)
            nursery.cancel_scope.cancel()
        assert [each["address"] for each in found] == asked
        return [(each["answers"], each["says"].partition(" in ")[0]) for each in found]

    assert trio.run(probe, ()) == []
    found = trio.run(all_of_them)
    assert found == [
        (True, "answers"),
        (False, f"another peer answers there, {ME}"),
        (False, "it hung up"),
    ]


@pytest.mark.anyio
@pytest.mark.net
async def test_the_join_page_says_that_nobody_answers(tmp_path: Path) -> None:
    with kept_port() as port:
        invitation = inviting(f"/ip4/127.0.0.1/tcp/{port}/p2p/{ME}")
        async with open_court(tmp_path / "judge", tmp_path, invitation=invitation) as court:

            async def told() -> bool:
                page = (await court.http.get("/join")).text
                return "does not answer this judge: nothing listens on that port" in page

            assert await eventually(told)


def test_an_invitation_to_another_curriculum_is_rejected(tmp_path: Path) -> None:
    options = ["--curriculum", "tiny-9", "--database", str(tmp_path / "judge")]
    done = CliRunner().invoke(app, ["serve", *options, "--invitation", inviting(curriculum="sapo-9")])
    assert isinstance(done.exception, JudgeError) and "Set curriculum = 'sapo-9'" in str(done.exception)


def test_init_uses_the_curriculum_of_the_invitation(tmp_path: Path) -> None:
    """A judge with such a file accepts the nodes that joined by the same invitation."""
    done = CliRunner().invoke(app, ["init", str(tmp_path), "--invitation", f" '{inviting()}'"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "judge.toml").read_text()
    assert f'\ninvitation = "{inviting()}"' in text and '\ncurriculum = "tiny-9"' in text
    assert CliRunner().invoke(app, ["init", str(tmp_path / "b"), "--invitation", "swarm:x"]).exit_code == 1
