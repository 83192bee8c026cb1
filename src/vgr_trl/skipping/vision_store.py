"""Features of images, up to a number of bytes."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from vgr_trl.skipping.vision_features import ImageFeatures


@dataclass
class FeatureStore:
    """Keeps what there is room for, and nothing else: what a rollout reads in turns would push itself out.

    Attributes:
        limit: bytes.
        used: bytes.
    """

    limit: int
    used: int = 0
    _kept: dict[Hashable, ImageFeatures] = field(default_factory=dict)
    _wanted: set[Hashable] = field(default_factory=set)

    def get(self, key: Hashable) -> ImageFeatures | None:
        """Return the features of an image, if they are kept."""
        self._wanted.add(key)
        return self._kept.get(key)

    def put(self, key: Hashable, features: ImageFeatures) -> None:
        """Keep the features of an image, if there is room."""
        if self.used + features.bytes <= self.limit and key not in self._kept:
            self._kept[key] = features
            self.used += features.bytes

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self._wanted.clear()
        self.used = 0

    def drop_unwanted(self) -> None:
        """Drop what nobody has asked for since the last call."""
        for key in self._kept.keys() - self._wanted:
            self.used -= self._kept.pop(key).bytes
        self._wanted.clear()
