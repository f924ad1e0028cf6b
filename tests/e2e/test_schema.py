"""Requests that schemathesis makes up from the OpenAPI document, good ones and bad ones, always the
same: none is answered with a status that says that the server failed, or that the document lacks."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 20
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


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_made_up_requests_are_answered_as_the_document_says(operations, mode):
    answered = set()
    for operation in operations:
        # Only bodies can be wrong.
        if mode.is_negative and operation.method != "post":
            continue

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
            # Whatever is asked for ends soon.
            if isinstance(case.body, dict):
                for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    if isinstance(case.body.get(limit), int):
                        case.body[limit] = min(case.body[limit], 4)
            response = case.call(timeout=120)
            case.validate_response(response, checks=CHECKS)
            answered.add((operation.label, response.status_code))

        check()
    assert 400 in {status for _, status in answered}
