"""A server that says what a test scripts, one for each module of the APIs, and what talks with it."""

import pytest

from tests.serve.scripted import small_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def server(tokenizer):
    from tests.serve.served import serving  # needs what serving is installed with

    with serving(tokenizer) as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
