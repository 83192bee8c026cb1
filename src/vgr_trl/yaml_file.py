"""YAML as people mean it: what the reader would make something else of in silence is an error."""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError


class StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, and numbers that YAML 1.1 reads as octal or in base 60."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, or raise `ConstructorError` for a key given twice."""
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:str":
                if key.value in seen:
                    raise ConstructorError(None, None, f"the key {key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Return the number, or raise `ConstructorError` for one that does not mean what it shows."""
        value = int(super().construct_yaml_int(node))
        if re.match(r"[-+]?0[\d_]|.*:", str(node.value)) and value != 0:
            raise ConstructorError(None, None, f"YAML reads {node.value} as {value}: write that", node.start_mark)
        return value


StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_yaml_int)


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says, or raise `yaml.YAMLError`."""
    return yaml.load(text, StrictLoader)  # a safe loader
