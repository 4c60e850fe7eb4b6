"""Stores of many kinds behind one face, with raw access that goes around the code under test."""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_numbers = itertools.count()


def unique_name() -> str:
    """Return a name that no other test, of this run or another, has."""
    return f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}"


class Store(ABC):
    """A place for one test, empty at first.

    Attributes:
        url: root for the test to write below.
        storage_options: what fsspec needs for `url`, or None.
        filesystem: an instance to hand over in place of options, or None.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None, filesystem: Any = None) -> None:
        self.url = url
        self.storage_options = storage_options
        self.filesystem = filesystem

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that a storage writer or reader takes beside the url."""
        return {"storage_options": self.storage_options, "filesystem": self.filesystem}

    def below(self, name: str) -> str:
        """Return the URL of a name below the root."""
        return f"{self.url}/{name}"

    @abstractmethod
    def raw_list(self) -> dict[str, int]:
        """Return the size of every file, by its name below the root."""

    @abstractmethod
    def raw_read(self, name: str) -> bytes: ...

    @abstractmethod
    def raw_write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def raw_delete(self, name: str) -> None: ...

    def flip(self, name: str, offset: int) -> None:
        """Change one byte behind everybody's back."""
        data = bytearray(self.raw_read(name))
        data[offset] ^= 0xFF
        self.raw_write(name, bytes(data))

    def close(self) -> None:
        """Remove everything below the root."""
        for name in self.raw_list():
            self.raw_delete(name)


class FolderStore(Store):
    """Anything whose files lie in a local folder: paths, `file://`, a server over a folder."""

    def __init__(self, folder: Path, url: str, storage_options: dict[str, Any] | None = None) -> None:
        super().__init__(url, storage_options)
        self.folder = folder

    def raw_list(self) -> dict[str, int]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files}

    def raw_read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def raw_write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_delete(self, name: str) -> None:
        os.unlink(self.folder / name)


class MemoryStore(Store):
    """`memory://`, which all of a process share."""

    def __init__(self) -> None:
        self._root = f"/{unique_name()}"
        super().__init__(f"memory:/{self._root}")

    def raw_list(self) -> dict[str, int]:
        prefix = f"{self._root}/"
        files = {path: file.size for path, file in MemoryFileSystem.store.items() if path.startswith(prefix)}
        return {path.removeprefix(prefix): int(size) for path, size in files.items()}

    def raw_read(self, name: str) -> bytes:
        return bytes(MemoryFileSystem.store[f"{self._root}/{name}"].getvalue())

    def raw_write(self, name: str, data: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(f"{self._root}/{name}", data)

    def raw_delete(self, name: str) -> None:
        del MemoryFileSystem.store[f"{self._root}/{name}"]

    def close(self) -> None:
        super().close()
        below = f"{self._root}/"
        folders = MemoryFileSystem.pseudo_dirs
        folders[:] = [path for path in folders if path != self._root and not path.startswith(below)]


class S3Store(Store):
    """A prefix in a bucket; raw access by boto3.

    Args:
        client: of boto3.
        bucket: existing.
        storage_options: as for `Store`.
        filesystem: as for `Store`.
    """

    def __init__(
        self, client: Any, bucket: str, storage_options: dict[str, Any] | None = None, filesystem: Any = None
    ) -> None:
        self.client = client
        self.bucket = bucket
        self.prefix = unique_name()
        super().__init__(f"s3://{bucket}/{self.prefix}", storage_options, filesystem)

    def raw_list(self) -> dict[str, int]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        found = [entry for page in pages for entry in page.get("Contents", [])]
        return {entry["Key"].removeprefix(f"{self.prefix}/"): int(entry["Size"]) for entry in found}

    def raw_read(self, name: str) -> bytes:
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")
        return bytes(answer["Body"].read())

    def raw_write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=data)

    def raw_delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")

    def close(self) -> None:
        super().close()
        if self.storage_options is not None:
            # fsspec shares one instance, and with it listings, between all users of equal options.
            fsspec.filesystem("s3", **self.storage_options).invalidate_cache()


class AzureStore(Store):
    """A prefix in a container; raw access by Azure's own client.

    Args:
        client: of the container.
        storage_options: as for `Store`.
    """

    def __init__(self, client: Any, storage_options: dict[str, Any]) -> None:
        self.client = client
        self.prefix = unique_name()
        super().__init__(f"abfs://{client.container_name}/{self.prefix}", storage_options)

    def raw_list(self) -> dict[str, int]:
        found = self.client.list_blobs(name_starts_with=f"{self.prefix}/")
        return {blob.name.removeprefix(f"{self.prefix}/"): int(blob.size) for blob in found}

    def raw_read(self, name: str) -> bytes:
        return bytes(self.client.download_blob(f"{self.prefix}/{name}").readall())

    def raw_write(self, name: str, data: bytes) -> None:
        self.client.upload_blob(f"{self.prefix}/{name}", data, overwrite=True)

    def raw_delete(self, name: str) -> None:
        self.client.delete_blob(f"{self.prefix}/{name}")


class GcsStore(Store):
    """A prefix in a bucket; raw access by plain HTTP.

    Args:
        endpoint_url: of the server.
        bucket: existing.
        storage_options: as for `Store`.
    """

    def __init__(self, endpoint_url: str, bucket: str, storage_options: dict[str, Any]) -> None:
        self.endpoint_url = endpoint_url
        self.bucket = bucket
        self.prefix = unique_name()
        super().__init__(f"gs://{bucket}/{self.prefix}", storage_options)

    def _object(self, name: str) -> str:
        return f"/storage/v1/b/{self.bucket}/o/{quote(f'{self.prefix}/{name}', safe='')}"

    def _ask(self, path: str, data: bytes | None = None, method: str | None = None) -> bytes:
        request = urllib.request.Request(f"{self.endpoint_url}{path}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def raw_list(self) -> dict[str, int]:
        answer = json.loads(self._ask(f"/storage/v1/b/{self.bucket}/o?prefix={self.prefix}/"))
        return {item["name"].removeprefix(f"{self.prefix}/"): int(item["size"]) for item in answer.get("items", [])}

    def raw_read(self, name: str) -> bytes:
        return self._ask(f"{self._object(name)}?alt=media")

    def raw_write(self, name: str, data: bytes) -> None:
        query = f"uploadType=media&name={quote(f'{self.prefix}/{name}', safe='')}"
        self._ask(f"/upload/storage/v1/b/{self.bucket}/o?{query}", data, "POST")

    def raw_delete(self, name: str) -> None:
        self._ask(self._object(name), method="DELETE")


def obstore_filesystem(endpoint_url: str, access_key: str, secret_key: str) -> Any:
    """Return obstore's fsspec filesystem for an S3 server."""
    from obstore.fsspec import FsspecStore

    return FsspecStore(
        "s3",
        endpoint=endpoint_url,
        access_key_id=access_key,
        secret_access_key=secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
