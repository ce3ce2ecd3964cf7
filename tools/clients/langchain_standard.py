"""LangChain's standard tests of chat models, with what it has for OpenAI's and
Anthropic's APIs.

    python -m pytest -c tools/clients/langchain.ini \\
        tools/clients/langchain_standard.py

CLIENTS_MODEL names the model; it is Gemma 3 270M unless it does. What that is
too small for is in langchain.toml, by name and with the reason: these tests
have to fail, and all others to pass. At temperature 0 this does not change.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import NAME, serving

_OF_ALL = {
    "api_key": "none", "model": NAME, "max_retries": 0, "max_tokens": 64,
    "temperature": 0,
}  # fmt: skip


HERE = Path(__file__).resolve().parent


def _judged() -> dict[str, str]:
    """Reasons by names of tests that judge the model."""
    if "CLIENTS_MODEL" in os.environ:
        return {}
    groups = tomllib.loads((HERE / "langchain.toml").read_text("utf-8"))
    return {
        name: group["reason"]
        for group in groups["judged"]
        for name in group["tests"]
    }


_JUDGED = _judged()


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with serving(model=os.environ.get("CLIENTS_MODEL", NAME)) as found:
        yield found


class _Standard(ChatModelIntegrationTests):
    """Of any of the three."""

    url: str

    @pytest.fixture(autouse=True, scope="class")
    def _address(self, request: pytest.FixtureRequest, url: str) -> None:
        request.cls.url = url

    @pytest.fixture(autouse=True)
    def _expected(self, request: pytest.FixtureRequest) -> None:
        reason = _JUDGED.get(request.node.nodeid.partition("::")[2])
        if reason is not None:
            request.applymarker(pytest.mark.xfail(strict=True, reason=reason))

    @pytest.fixture
    def model(self, url: str, request: Any) -> BaseChatModel:
        type(self).url = url
        more = getattr(request, "param", None) or {}
        return self.chat_model_class(**self.chat_model_params, **more)

    # What the server does not have, or LangChain's defaults have otherwise.
    has_tool_choice = True
    supports_json_mode = False
    supports_image_inputs = False
    supports_pdf_inputs = False
    supports_audio_inputs = False
    supports_image_tool_message = False
    supports_pdf_tool_message = False
    supports_model_override = False
    enable_vcr_tests = False


class TestChatOpenAI(_Standard):
    chat_model_class = ChatOpenAI
    supports_json_mode = True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        base = f"{self.url}/v1"
        return {"base_url": base, "stream_usage": True, **_OF_ALL}


class TestChatOpenAIResponses(_Standard):
    chat_model_class = ChatOpenAI
    supports_json_mode = True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        base = f"{self.url}/v1"
        return {"base_url": base, "use_responses_api": True, **_OF_ALL}


class TestChatAnthropic(_Standard):
    chat_model_class = ChatAnthropic
    supports_anthropic_inputs = False

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"base_url": self.url, **_OF_ALL}
