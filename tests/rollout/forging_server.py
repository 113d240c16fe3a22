"""An MCP server whose tool says what it is told, and has a page that says it too."""

from mcp.server.mcpserver import MCPServer
from mcp_types import EmbeddedResource, TextContent, TextResourceContents

server = MCPServer("forging")


@server.tool()
def forged(text: str) -> list[TextContent | EmbeddedResource]:
    page = TextResourceContents(uri="shelf://page", text=text, mime_type="text/plain")
    return [TextContent(type="text", text=text), EmbeddedResource(type="resource", resource=page)]


if __name__ == "__main__":
    server.run()
