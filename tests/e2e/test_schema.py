"""Requests that schemathesis makes up from the OpenAPI document, good ones and bad ones, always the
same: none is answered with a status that says that the server failed, or that the document lacks."""

import itertools

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

MODEL = "tiny-deepseek-v2"
EXAMPLES = 20
# Every second one names the model that is served and a context that is kept, whatever was made up: what
# is made up names neither, and would be refused before anything else is looked at.
KNOWN_EVERY = 2
# The engines here make none.
NEVER_ANSWERED = "/v1/embeddings"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="session")
def operations(cluster):
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) >= 9
    return found


@pytest.fixture(scope="session")
def context(http):
    body = {"model": MODEL, "messages": [{"role": "system", "content": "The manual. " * 40}], "ttl_s": 600}
    answer = http.post("/v1/contexts", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def bounded(case):
    """Whatever is asked for ends soon."""
    if isinstance(case.body, dict):
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(limit), int):
                case.body[limit] = min(case.body[limit], 4)


def known(case, context):
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL
    if "id" in case.path_parameters:
        case.path_parameters["id"] = context
    if "name" in case.path_parameters:
        case.path_parameters["name"] = MODEL


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_made_up_requests_are_answered_as_the_document_says(operations, context, mode):
    answered = set()
    for operation in operations:
        # Only bodies can be wrong.
        if mode.is_negative and operation.method != "post":
            continue

        made = itertools.count()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case):
            bounded(case)
            if next(made) % KNOWN_EVERY == 0:
                known(case, context)
            response = case.call(timeout=120)
            case.validate_response(response, checks=CHECKS)
            answered.add((operation.label, response.status_code))

        check()
    assert 400 in {status for _, status in answered}
    if mode.is_positive:
        good = {label for label, status in answered if status == 200}
        missed = {operation.label for operation in operations} - good
        assert missed <= {f"POST {NEVER_ANSWERED}"}, answered
