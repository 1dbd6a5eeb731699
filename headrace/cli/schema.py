"""`headrace schema`: what editors check and complete a run file by."""

import json


def schema() -> None:
    """Print the JSON schema of run files, for editors to check and complete them."""
    from headrace.run.schema import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
