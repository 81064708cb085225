"""Stands in for `vllm serve` 0.33.0 without a GPU.

It has the options and routes that the engine uses, with a real transformers model behind them. It rejects
unknown options and fields, so that a misspelt name is detected.

    python standin.py [-m vllm.entrypoints.cli.main] serve MODEL --uds SOCKET | --port PORT …
"""

import argparse
import json
import os
import socket
import socketserver
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

FIELDS = {  # of CompletionRequest (vllm/entrypoints/openai/completion/protocol.py)
    "model",
    "prompt",
    "n",
    "max_tokens",
    "temperature",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "return_token_ids",
    "add_special_tokens",
    "allowed_token_ids",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}


OPTIONS = argparse.ArgumentParser(allow_abbrev=False)
OPTIONS.add_argument("model")
OPTIONS.add_argument("--uds")
OPTIONS.add_argument("--port", type=int, default=0)
OPTIONS.add_argument("--served-model-name", default="base")
OPTIONS.add_argument("--dtype", default="float32")
OPTIONS.add_argument("--logprobs-mode", default="raw_logprobs")
OPTIONS.add_argument("--generation-config", default="auto")
OPTIONS.add_argument("--disable-uvicorn-access-log", action="store_true")
OPTIONS.add_argument("--enable-lora", action="store_true")
OPTIONS.add_argument("--max-loras", type=int, default=1)
OPTIONS.add_argument("--max-lora-rank", type=int, choices=(1, 8, 16, 32, 64, 128, 256, 320, 512), default=16)
OPTIONS.add_argument("--gpu-memory-utilization", type=float)
OPTIONS.add_argument("--enable-sleep-mode", action="store_true")
CHOSEN = OPTIONS.parse_args(sys.argv[sys.argv.index("serve") + 1 :])  # parsed before the slow imports
print("stand-in: starting", flush=True)

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Lock()
        self.network: Any = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        self.adapters: dict[str, str] = {}
        self.asleep = False
        self.said: list[str] = []  # paths of requests; tests read them at /standin/calls

    def get(self, path: str) -> Any:
        if path == "/health":
            return {}
        if path == "/v1/models":
            served = [{"id": self.options.served_model_name, "parent": None}]
            return {
                "data": served + [{"id": a, "parent": self.options.served_model_name} for a in self.adapters]
            }
        if path == "/standin/calls":
            return {"calls": self.said, "adapters": self.adapters, "asleep": self.asleep}
        raise Refused(404, "Not Found")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.said.append(path)
        plain = path.partition("?")[0]
        routes = {"/v1/completions": self.complete}
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
            routes["/v1/load_lora_adapter"] = self.load_adapter
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
            routes |= {"/collective_rpc": self.rpc, "/reset_prefix_cache": lambda _: {"success": True}}
            routes |= {"/sleep": lambda _: self.rest(True), "/wake_up": lambda _: self.rest(False)}
        if plain not in routes:
            raise Refused(404, "Not Found")
        with self.lock:
            return routes[plain](body)

    def rest(self, asleep: bool) -> Any:
        self.asleep = asleep
        return {"status": "sleeping" if asleep else "awake"}

    def load_adapter(self, body: dict[str, Any]) -> Any:
        name, folder = body["lora_name"], body["lora_path"]
        if not self.options.enable_lora:
            raise Refused(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if name in self.adapters and not body.get("load_inplace"):
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(folder) / "adapter_model.safetensors").is_file():
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {folder}")
        rank = json.loads((Path(folder) / "adapter_config.json").read_text())["r"]
        if rank > self.options.max_lora_rank:
            raise Refused(
                500, f"LoRA rank {rank} is greater than max_lora_rank {self.options.max_lora_rank}."
            )
        if isinstance(self.network, PeftModel):
            self.network = self.network.unload()
        self.network = PeftModel.from_pretrained(self.network, folder).eval()
        self.adapters[name] = folder
        return f"Success: LoRA adapter '{name}' added successfully."

    def rpc(self, body: dict[str, Any]) -> Any:
        assert body["method"] == "reload_weights", body
        tensors = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        missing, unexpected = self.network.load_state_dict(tensors, strict=False)
        self.network.tie_weights()
        tied = (
            set(getattr(self.network, "_tied_weights_keys", None) or ())
            if self.network.config.tie_word_embeddings
            else set()
        )
        assert not unexpected, unexpected
        assert set(missing) <= tied, missing
        return {"results": [None]}

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> Any:
        if unknown := set(body) - FIELDS:
            raise Refused(400, f"unknown fields {unknown}")
        if self.asleep:
            raise Refused(500, "the engine sleeps")
        greedy = body["temperature"] == 0
        if greedy and body["n"] != 1:
            raise Refused(400, f"n must be 1 when using greedy sampling, got {body['n']}.")
        if body["model"] not in {self.options.served_model_name, *self.adapters}:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        choices = []
        for k in range(body["n"]):
            source = torch.Generator().manual_seed((body.get("seed") or 0) + k)
            ids, logprobs = self.answer(body, source, greedy, adapted=body["model"] in self.adapters)
            found = {"token_logprobs": logprobs, "tokens": [], "top_logprobs": [], "text_offset": []}
            choice = {
                "index": k,
                "text": "",
                "finish_reason": "stop",
                "logprobs": found if body.get("logprobs") is not None else None,
            }
            choices.append(choice | ({"token_ids": ids} if body.get("return_token_ids") else {}))
        return {"choices": choices}

    def answer(
        self, body: dict[str, Any], source: torch.Generator, greedy: bool, adapted: bool
    ) -> tuple[list[int], list[float]]:
        off = (
            self.network.disable_adapter()
            if isinstance(self.network, PeftModel) and not adapted
            else nullcontext()
        )
        with off:
            return self.draw(body, source, greedy)

    def draw(
        self, body: dict[str, Any], source: torch.Generator, greedy: bool
    ) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < body["max_tokens"]:
            raw = self.network(torch.tensor([[*body["prompt"], *ids]])).logits[0, -1].float()
            logits = raw.clone()
            if "allowed_token_ids" in body:
                logits = torch.full_like(raw, float("-inf"))
                logits[body["allowed_token_ids"]] = raw[body["allowed_token_ids"]]
            processed = torch.log_softmax(logits / (body["temperature"] or 1.0), -1)
            token = int(
                processed.argmax() if greedy else torch.multinomial(processed.exp(), 1, generator=source)
            )
            told = (
                processed
                if self.options.logprobs_mode == "processed_logprobs"
                else torch.log_softmax(raw, -1)
            )
            ids.append(token)
            logprobs.append(float(told[token]))
            if token in body["stop_token_ids"]:
                break
        return ids, logprobs


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    standin: Server

    def do_GET(self) -> None:
        self.reply(lambda: self.standin.get(self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply(lambda: self.standin.post(self.path, json.loads(body or b"{}")))

    def reply(self, call: Any) -> None:
        try:
            status, found = 200, call()
        except Refused as error:
            status, found = (
                error.status,
                {"error": {"message": str(error), "type": "x", "code": error.status}},
            )
        content = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        return "client"

    def log_message(self, *_: Any) -> None:
        pass


class Threaded(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True


class OnSocket(Threaded):
    address_family = socket.AF_UNIX


def main() -> None:
    torch.set_num_threads(1)
    handler = type("Bound", (Handler,), {"standin": Server(CHOSEN)})
    server = OnSocket(CHOSEN.uds, handler) if CHOSEN.uds else Threaded(("127.0.0.1", CHOSEN.port), handler)
    print(f"stand-in: ready on {CHOSEN.uds or server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
