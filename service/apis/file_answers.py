"""Published files as answers: one of them, or all as a tar."""

from urllib.parse import quote

from fastapi.responses import StreamingResponse

from service.files.files import PublishedFiles


def file_answer(files: PublishedFiles, path: str) -> StreamingResponse:
    """Send one file. Raises NotFound."""
    entry = files.entry(path)
    headers = {"content-length": str(entry.size), "etag": f'"{entry.sha256}"'}
    return StreamingResponse(files.content(entry), media_type="application/octet-stream", headers=headers)


def tar_answer(files: PublishedFiles, folder: str) -> StreamingResponse:
    """Send all files as a tar of one folder, to be saved under its name."""
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(folder)}.tar"}
    return StreamingResponse(files.tar(folder), media_type="application/x-tar", headers=headers)
