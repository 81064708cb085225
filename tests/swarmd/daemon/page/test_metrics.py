"""/metrics: the text that Prometheus reads, and who may ask for it."""

import re

import pytest
import trio

from swarmd.config.addresses import host_and_port
from swarmd.daemon.page.opening import PageOpening
from swarmd.daemon.page.prometheus import exposition
from swarmd.errors import SwarmdError
from swarmd.state.status import Status
from tests.ports import kept_port
from tests.swarmd.cli.test_view import AWAY, status_of
from tests.swarmd.daemon.page.served import Node

LINE = re.compile(r'^[a-z_]+(\{[a-z]+="([^"\\\n]|\\.)*"(,[a-z]+="([^"\\\n]|\\.)*")*\})? -?[0-9.e+-]+$')


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    assert text.endswith("\n") and all(LINE.match(line) for line in lines)
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_figures_of_the_status_are_metrics() -> None:
    text = exposition(status_of(rewards=[]))
    found = samples(text)
    assert (
        found["swarmd_round"] == 120
        and found["swarmd_peers_heard"] == 2
        and found["swarmd_judge_score"] == 0.31
    )
    assert found['swarmd_state{state="training"}'] == 1 and found['swarmd_state{state="paused"}'] == 0
    assert found['swarmd_refused_total{reason="already seen"}'] == 12
    away = samples(exposition(status_of(away=[AWAY])))
    assert away['swarmd_away{kind="month"}'] == 1 and away['swarmd_state{state="training"}'] == 1
    assert any(key.startswith("swarmd_node{") and 'model="tiny"' in key for key in found)
    assert "# TYPE swarmd_refused_total counter\n" in text and "# TYPE swarmd_round gauge\n" in text
    begun = samples(exposition(Status()))
    assert (begun['swarmd_state{state="starting"}'], begun['swarmd_state{state="training"}']) == (1, 0)


def test_texts_of_other_nodes_do_not_end_a_line() -> None:
    found = samples(exposition(status_of(name='a"b\\c\nswarmd_round 7', rejected={'x"} 1\n': 3})))
    assert found["swarmd_round"] == 120 and sum(key.startswith("swarmd_refused_total") for key in found) == 1


def test_an_address_is_a_port_or_a_host_with_one() -> None:
    here = "127.0.0.1:9464"
    for text, means in (
        ("", ""),
        ("9464", here),
        (":9464", here),
        ("0.0.0.0:80", "0.0.0.0:80"),
        ("[::1]:1", "[::1]:1"),
    ):
        assert host_and_port(text) == means
    for text in ("x", "0", "70000", "host:", "h o:1", "http://127.0.0.1:9464", "999.0.0.1:1", "-1"):
        with pytest.raises(ValueError, match="neither host:port nor a port"):
            host_and_port(text)


@pytest.mark.net
async def test_metrics_are_served_at_the_operators_address_and_a_rebound_name_is_refused() -> None:
    node = Node()
    with kept_port() as port:
        node.address = f"http://127.0.0.1:{port}/?token="
        async with trio.open_nursery() as nursery:
            await PageOpening(nursery, node.handlers()).serve_metrics(f"127.0.0.1:{node.port}")
            status, head, text = await node.ask("GET /metrics")
            assert (
                status == 200
                and samples(text)["swarmd_round"] == 120
                and "content-type: text/plain; version=0.0.4" in head
            )
            assert (await node.ask("GET /metrics", host=f"evil.example:{node.port}"))[0] == 403
            assert (await node.ask("GET /metrics", "Origin: http://evil.example"))[0] == 403
            for other in ("GET /", "POST /metrics", "GET /events", "GET /static/page.js"):
                assert (await node.ask(other))[0] == 404
            with pytest.raises(SwarmdError, match=r"^metrics\.listen: .*cannot listen there.*Choose another"):
                await PageOpening(nursery, node.handlers()).serve_metrics(f"127.0.0.1:{node.port}")
            nursery.cancel_scope.cancel()
