"""A process that puts TLS before a TCP server. Arguments: its port, the server's, certificate, key."""

from __future__ import annotations

import asyncio
import ssl
import sys


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server_port: int) -> None:
    """One client's connection, both ways, until either ends."""
    server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server_port)
    await asyncio.gather(pump(reader, server_writer), pump(server_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All bytes of one direction."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main(port: int, server_port: int, certificate: str, key: str) -> None:
    """Serve until killed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = await asyncio.start_server(lambda r, w: relay(r, w, server_port), "127.0.0.1", port, ssl=context)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
