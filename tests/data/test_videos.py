from pathlib import Path

import pytest
from datasets import Dataset
from PIL import Image

from vgr_trl.data.checked_rows import RowOptions, prepare_rows, ready_row
from vgr_trl.data.images import frames_of
from vgr_trl.data.prompts import refuse_single_image_models
from vgr_trl.demo.tiny_model import build_processor
from vgr_trl.errors import ConfigError, DataError

av = pytest.importorskip("av")
LEVELS = range(0, 240, 12)  # grey of frame 0, 1, …: 20 frames


def write_video(path: Path, images=(), rotation: int = 0) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.bit_rate = 4_000_000
        stream.set_display_rotation(rotation)
        for image in images or [Image.new("L", (64, 48), level) for level in LEVELS]:
            container.mux(stream.encode(av.VideoFrame.from_image(image.convert("RGB"))))
        container.mux(stream.encode())
    return path


def greys(frames) -> list[int]:
    return [round(frame.convert("L").getpixel((5, 5)) / 12) for frame in frames]


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "grey.mp4")


@pytest.mark.parametrize(
    ("fps", "numbers"),
    [
        (1, [0, 10]),  # of 20 frames at 10 a second
        (3, [0, 4, 7, 10, 14, 17]),  # due at 0, 3.33, 6.67, 10, … frames: the next frame that is shown
        (0.1, [0]),
        (10, list(range(20))),
    ],
)
def test_frames_are_taken_at_a_steady_rate(video, fps, numbers):
    frames = frames_of({"video": str(video)}, fps, 20)
    assert greys(frames) == numbers
    assert {(frame.size, frame.mode) for frame in frames} == {((64, 48), "RGB")}


def test_other_containers_bytes_and_relative_paths(video, tmp_path):
    row = {"video": str(write_video(tmp_path / "a.mkv"))}
    assert greys(frames_of(row, 2, 20)) == [0, 5, 10, 15]
    for value in (video.read_bytes(), {"bytes": video.read_bytes(), "path": None}, {"path": "grey.mp4"}, "grey.mp4"):
        assert greys(frames_of({"videos": [value]}, 1, 2, video.parent)) == [0, 10]


def test_frames_are_turned_as_the_video_says(tmp_path):
    stored = Image.new("L", (64, 48))  # the upper half is black, the lower half white
    stored.paste(255, (0, 24, 64, 48))
    (frame,) = frames_of({"video": str(write_video(tmp_path / "turned.mp4", [stored], 90))}, 2, 16)
    assert frame.size == (48, 64)
    left, right = (frame.convert("L").getpixel((x, 32)) for x in (6, 42))
    assert left < 40  # counterclockwise by 90 degrees, what was above is left
    assert right > 215


def test_a_row_with_more_frames_than_allowed_is_refused_and_one_with_as_many_is_not(video):
    two = {"videos": [str(video)] * 2}
    assert greys(frames_of(two, 1, 4)) == [0, 10, 0, 10]
    with pytest.raises(DataError):
        frames_of(two, 1, 3)


def test_a_video_that_cannot_be_read_is_a_reason_and_a_list_of_other_files_is_not_followed(tmp_path):
    """FFmpeg itself would follow both lists, which name a video beside them."""
    write_video(tmp_path / "grey.ts")
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\ngrey.ts\n#EXT-X-ENDLIST\n")
    (tmp_path / "concat.mp4").write_text("ffconcat version 1.0\nfile grey.ts\n")
    for value in (tmp_path / "no.mp4", tmp_path, 7, tmp_path / "list.m3u8", tmp_path / "concat.mp4"):
        with pytest.raises(DataError):
            ready_row({"problem": "q", "solution": "x", "videos": [value]}, RowOptions())


@pytest.mark.parametrize("streaming", [False, True])
def test_frames_come_behind_the_images_of_a_row(video, streaming):
    Image.new("RGB", (8, 9), "red").save(video.parent / "a.png")
    rows = [
        {"problem": "one", "images": [str(video.parent / "a.png")], "videos": ["grey.mp4"]},
        {"problem": "none", "images": [], "videos": []},
        {"problem": "bad", "images": [], "videos": ["missing.mp4"]},
        {"problem": "<video>two", "images": [], "videos": ["grey.mp4", "grey.mp4"]},
    ]
    made = Dataset.from_list([{**row, "solution": "x"} for row in rows])
    heard, limits = [], {"video_fps": 1, "max_video_frames": 4}
    given = {"root": video.parent, "system_prompt": None, "on_skipped": heard.append, **limits}
    rows, skipped = prepare_rows(made.to_iterable_dataset() if streaming else made, **given)
    found = list(rows)
    assert [row["prompt"][0]["content"] for row in found] == ["one", "none", "two"]
    assert [len(row["images"]) for row in found] == [3, 0, 4]
    assert found[0]["images"][0].size == (8, 9)
    assert greys(found[0]["images"][1:]) == [0, 10]
    assert not {"video", "videos", "image"} & set(found[0])
    assert [(row.row, "missing.mp4" in row.reason) for row in skipped or heard] == [(2, True)]


def test_videos_need_a_model_for_several_images(monkeypatch):
    processor = build_processor(["?"])
    refuse_single_image_models(processor)
    apply = type(processor).apply_chat_template

    def of_first_image(self, conversation, **options):
        turns = [{**turn, "content": turn["content"][:1] + turn["content"][-1:]} for turn in conversation[0]]
        return apply(self, [turns], **options)

    monkeypatch.setattr(type(processor), "apply_chat_template", of_first_image)
    with pytest.raises(ConfigError):
        refuse_single_image_models(processor)
