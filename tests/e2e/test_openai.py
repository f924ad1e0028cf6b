"""The `openai` package drives a cluster as it drives any OpenAI-compatible service."""

import asyncio

import openai
import pytest

MODEL = "tiny-deepseek-v2"
BLOCK_TOKENS = 64
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
CONTEXT_TOKENS = 4096


def question_of(case):
    """The user's words of a case whose prompt came from the chat template."""
    return case["text"].removeprefix("<|begin|><|user|>").removesuffix("<|assistant|>")


@pytest.fixture
def chats(cases):
    found = [case for case in cases if case["text"]]
    assert found
    return found


def ask(client, content, **options):
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], **options
    )


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chats_give_the_reference_tokens(client, chats):
    for case in chats:
        answer = ask(client, question_of(case), max_tokens=24, **GREEDY)
        assert answer.choices[0].token_ids == case["greedy"]
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.prompt_tokens == len(case["prompt"])
        assert answer.usage.completion_tokens == 24
        assert answer.usage.total_tokens == len(case["prompt"]) + 24


def test_token_prompts_give_the_reference_tokens(client, cases):
    for case in cases:
        answer = client.completions.create(
            model=MODEL, prompt=case["prompt"], max_tokens=24, **GREEDY
        )
        assert answer.choices[0].token_ids == case["greedy"]


def test_streamed_chats_join_to_the_unstreamed_text(client, chats):
    for case in chats:
        whole = ask(client, question_of(case), max_tokens=24, **GREEDY)
        chunks = list(ask(client, question_of(case), max_tokens=24, stream=True, **GREEDY))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert reasons[-1] == "length"
        assert all(reason is None for reason in reasons[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


def test_streamed_completions_join_to_the_unstreamed_text_and_tokens(client, cases):
    for case in cases:
        options = {"model": MODEL, "prompt": case["prompt"], "max_tokens": 24, **GREEDY}
        whole = client.completions.create(**options)
        chunks = list(client.completions.create(stream=True, **options))
        assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
        tokens = [t for c in chunks if c.choices for t in getattr(c.choices[0], "token_ids", None) or []]
        assert tokens == case["greedy"]


def test_a_stream_tells_its_usage_when_asked(client):
    options = {"stream": True, "max_tokens": 5, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, "How many?", **options, **GREEDY))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_text_prompt_is_the_same_as_its_tokens(client, chats):
    case = chats[0]
    answer = client.completions.create(model=MODEL, prompt=case["text"], max_tokens=24, **GREEDY)
    assert answer.choices[0].token_ids == case["greedy"]


def test_several_prompts_are_answered_in_order(client, cases):
    some = cases[:3]
    answer = client.completions.create(
        model=MODEL, prompt=[case["prompt"] for case in some], max_tokens=24, **GREEDY
    )
    by_index = sorted(answer.choices, key=lambda choice: choice.index)
    assert [choice.token_ids for choice in by_index] == [case["greedy"] for case in some]


def test_a_stop_string_ends_the_answer_before_it(client, chats):
    content = question_of(chats[0])
    whole = ask(client, content, max_tokens=24, **GREEDY).choices[0].message.content
    clean = [i for i in range(4, len(whole) - 3) if "\ufffd" not in whole[i : i + 3]]
    assert clean, whole
    stop = whole[clean[0] : clean[0] + 3]
    expected = whole[: whole.index(stop)]
    answer = ask(client, content, max_tokens=24, stop=[stop], **GREEDY).choices[0]
    assert answer.message.content == expected
    assert answer.finish_reason == "stop"
    chunks = ask(client, content, max_tokens=24, stop=stop, stream=True, **GREEDY)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected


def test_n_answers_differ_by_seed_and_repeat_with_it(client):
    options = {"max_tokens": 8, "n": 3, "seed": 11, "temperature": 1.0}
    extra = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    answers = [ask(client, "Say something.", **options, **extra) for _ in range(2)]
    tokens = [
        [choice.token_ids for choice in sorted(answer.choices, key=lambda c: c.index)]
        for answer in answers
    ]
    assert len(tokens[0]) == 3
    assert len({tuple(one) for one in tokens[0]}) == 3
    assert tokens[0] == tokens[1]


def test_chat_logprobs_name_the_best_tokens(client):
    answer = ask(client, "Why?", max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        best = [top.logprob for top in token.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert token.logprob == pytest.approx(best[0]) and token.logprob <= 0
        assert isinstance(token.bytes, list)


def test_completion_logprobs_name_the_best_tokens(client):
    answer = client.completions.create(
        model=MODEL, prompt=[0, 964], max_tokens=6, logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == 6
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_only_requests_with_the_same_salt_find_each_other_s_blocks(client):
    def cached(salt):
        salted = {"cache_salt": salt} if salt else {}
        extra = {"extra_body": {**GREEDY["extra_body"], **salted}}
        answer = client.completions.create(
            model=MODEL, prompt=list(range(100, 100 + 3 * BLOCK_TOKENS)), max_tokens=4, temperature=0, **extra
        )
        texts.add(answer.choices[0].text)
        return answer.usage.prompt_tokens_details.cached_tokens

    texts = set()
    found = [cached(salt) for salt in ("one", "one", "two", "two", None, None)]
    assert found[0] == found[2] == found[4] == 0
    assert all(tokens >= 2 * BLOCK_TOKENS for tokens in (found[1], found[3], found[5]))
    assert len(texts) == 1


def test_the_second_turn_of_a_conversation_reports_cached_tokens(client):
    first = [{"role": "user", "content": "Tell me of licences and of copies. " * 20}]
    options = {"model": MODEL, "max_tokens": 24, **GREEDY}
    answer = client.chat.completions.create(messages=first, **options)
    blocks = answer.usage.prompt_tokens // BLOCK_TOKENS
    assert blocks >= 2
    second = first + [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "And more?"},
    ]
    usage = client.chat.completions.create(messages=second, **options).usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached % BLOCK_TOKENS == 0
    # The last block of the first prompt ends with the words that ask for an answer; it is the same
    # in the second turn too.
    assert blocks * BLOCK_TOKENS <= cached < usage.prompt_tokens


def test_requests_at_once_do_not_mix(cluster, cases):
    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0
        ) as client:
            chosen = [cases[i % len(cases)] for i in range(24)]
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=MODEL, prompt=case["prompt"], max_tokens=24, **GREEDY
                    )
                    for case in chosen
                )
            )
            return [
                answer.choices[0].token_ids == case["greedy"]
                for answer, case in zip(answers, chosen)
            ]

    assert all(asyncio.run(run()))


def test_a_stream_that_is_closed_early_leaves_the_cluster_serving(client, cases):
    stream = client.completions.create(
        model=MODEL, prompt=[0, 964], max_tokens=3000, stream=True, **GREEDY
    )
    next(iter(stream))
    stream.close()
    answer = client.completions.create(
        model=MODEL, prompt=cases[0]["prompt"], max_tokens=24, **GREEDY
    )
    assert answer.choices[0].token_ids == cases[0]["greedy"]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="no-such-model", prompt="x")
    assert "no-such-model" in caught.value.message


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": -1},
        {"max_tokens": 10**12},
        {"temperature": -1},
        {"temperature": 1000},
        {"top_p": 2},
        {"n": 0},
        {"n": 100_000},
        {"logprobs": 1000},
        {"prompt": []},
        {"prompt": [5000]},
        {"prompt": [-1]},
        {"prompt": {"a": 1}},
        {"prompt": [0] * (CONTEXT_TOKENS + 1)},
        {"stop": ["a"] * 1000},
    ],
    ids=lambda options: str(options)[:40],
)
def test_absurd_parameters_are_bad_requests(client, options):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": [0, 964], **options})
    assert caught.value.body["message"]
    assert caught.value.body["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b"", {400}),
        (b"{", {400}),
        (b"[]", {400}),
        (b'{"model": "\xff"}', {400}),
        (b'{"model": "tiny-deepseek-v2"}', {400}),
        (b'{"model": "tiny-deepseek-v2", "prompt": "' + b"x" * 20_000_000 + b'"}', {413}),
    ],
    ids=["empty", "cut off", "no object", "bad UTF-8", "no prompt", "20 MB"],
)
def test_bodies_that_make_no_sense_are_answered_like_openai_does(http, body, statuses):
    reply = http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert reply.status_code in statuses
    assert reply.json()["error"]["message"]


def test_an_unknown_path_is_not_found(http):
    reply = http.get("/v1/nothing")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"]


def test_health_and_readiness_are_told(http):
    assert http.get("/healthz").status_code == 200
    assert http.get("/readyz").status_code == 200
    assert "kvasir_conductor" in http.get("/metrics").text
