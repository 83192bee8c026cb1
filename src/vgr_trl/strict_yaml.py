"""Read YAML safely: refuse duplicate keys and aliases that expand without end."""

from typing import Any

import yaml
from yaml.constructor import ConstructorError

MAX_YAML_NODES = 100_000  # with aliases expanded


class StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys, and aliases that expand to too many nodes."""

    def get_single_node(self) -> Any:
        """Return the document; raise `ConstructorError` if it is too large with expanded aliases."""
        document = super().get_single_node()
        waiting, seen = [document], 0
        while waiting:
            node, seen = waiting.pop(), seen + 1
            if seen > MAX_YAML_NODES:
                raise ConstructorError(None, None, f"its aliases repeat more than {MAX_YAML_NODES} values", None)
            for part in node.value if isinstance(node, yaml.CollectionNode) else ():
                waiting += part if isinstance(part, tuple) else [part]
        return document

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; raise `ConstructorError` for a duplicate key."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str":
                if key.value in seen:
                    raise ConstructorError(None, None, f"the key {key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text; raise `yaml.YAMLError` if it is invalid."""
    return yaml.load(text, StrictLoader)  # a safe loader
