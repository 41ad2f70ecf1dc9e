"""A stand-in for vLLM's server: its flags, its key, its plugins, and a stream for each completion."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams, likely
from vllm.lora.request import LoRARequest

PAGE = """# HELP vllm:prefix_cache_queries_total Prefix cache queries
vllm:prefix_cache_queries_total{{engine="0",model_name="slm"}} {}.0
vllm:prefix_cache_queries_created{{engine="0",model_name="slm"}} 1.7e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="slm"}} {}.0
vllm:external_prefix_cache_hits_total{{engine="0",model_name="slm"}} 77.0
"""
SWITCHES = ("disable_uvicorn_access_log", "enable_prompt_tokens_details", "metrics", "share_port")
ENGINE = {field.name: field.type for field in fields(AsyncEngineArgs)}
FLAGS = ENGINE | {"served_model_name": "str", "host": "str", "port": "int", "middleware": "str"}
KINDS = {"str": str, "int": int, "float": float}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def arguments() -> dict[str, Any]:
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    for name, kind in (FLAGS | dict.fromkeys(SWITCHES, "bool")).items():
        how = {"type": KINDS[kind]} if kind in KINDS else {"action": argparse.BooleanOptionalAction}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    return vars(parser.parse_args())


class Server:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.served = given, 0
        plugins = [found.load() for found in entry_points(group="vllm.stat_logger_plugins")]
        engine = {name: value for name, value in given.items() if name in ENGINE}
        engine |= {"skip_tokenizer_init": False, "disable_log_stats": False}
        self.engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine), [lambda *_: plugins[0](None, 0)])
        self.engine.trace.config = self.engine.vllm_config
        self.engine.trace.log_engine_initialized()

    async def serve(self) -> None:
        shared = self.given.get("share_port", False)
        server = await asyncio.start_server(self.connected, self.given["host"], self.given["port"], reuse_port=shared)
        await server.serve_forever()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self.answer(first.split()[1], headers, body, writer)

    async def answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/health":
            return say(writer, 200, {})
        if path == "/metrics" and self.given.get("metrics"):
            return said(writer, 200, PAGE.format(self.engine.looked_up, self.engine.found).encode(), "text/plain")
        if headers.get("authorization") != f"Bearer {os.environ['SLM_KEY']}":
            return say(writer, 401, {"error": "Unauthorized"})
        if path == "/collective_rpc":
            return say(writer, 200, {"results": await self.engine.collective_rpc(json.loads(body)["method"])})
        if path == "/v1/load_lora_adapter":
            return await self.load_adapter(json.loads(body), writer)
        await self.complete(json.loads(body), writer)

    async def load_adapter(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") != "1":  # then vLLM has no such path
            return say(writer, 404, {"detail": "Not Found"})
        try:
            await self.engine.add_lora(LoRARequest(asked["lora_name"], 1, asked["lora_path"]))
        except ValueError as error:
            return say(writer, 400, {"error": f"{error}"})
        say(writer, 200, {})

    async def complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if asked["model"] not in {self.given["served_model_name"], *self.engine.adapters}:
            return say(writer, 404, {"error": f"The model `{asked['model']}` does not exist."})
        self.served += 1
        parameters = SamplingParams(asked["max_tokens"], asked["temperature"], asked["ignore_eos"], True, "delta")
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        name = f"cmpl-{self.served}"
        try:
            tokens = self.engine.tokens({"prompt_token_ids": asked["prompt"]}, parameters, name)
            if not asked["stream"]:
                ids = [token async for token in tokens]
                table = [None, *({str(t): {"logprob": likely(t)}} for t in asked["prompt"][1:])]
                return say(writer, 200, {"choices": [{"token_ids": ids, "prompt_logprobs": table}], "usage": usage})
            await self.stream(writer, tokens, name, usage)
        except ValueError as error:
            say(writer, 400, {"error": str(error)})

    async def stream(self, writer: asyncio.StreamWriter, tokens: Any, name: str, usage: dict[str, Any]) -> None:
        cached = None
        async for token in tokens:
            if cached is None:
                writer.write(HEAD)
                cached = self.engine.sequences[name].cached
            event(writer, json.dumps({"choices": [{"index": 0, "text": f" t{token}", "finish_reason": None}]}))
            await writer.drain()
        if self.given.get("enable_prompt_tokens_details"):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        event(writer, json.dumps({"choices": [], "usage": usage}))
        event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")


def event(writer: asyncio.StreamWriter, data: str) -> None:
    text = f"data: {data}\n\n".encode()
    writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


def say(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    said(writer, status, json.dumps(value).encode(), "application/json")


def said(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str) -> None:
    head = f"HTTP/1.1 {status} said\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


if __name__ == "__main__":
    asyncio.run(Server(arguments()).serve())
