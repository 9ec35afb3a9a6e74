"""Tools and environments of the recipes beside this folder, some with mistakes."""


def search(query: str) -> str:
    """Search the index.

    Args:
        query: Words to search for.
    """
    return query


def bare(query, limit: int):
    return query


def undescribed(query: str) -> str:
    """Search the index."""
    return query


class Game:
    def reset(self, seed: int) -> str:
        return "guess"

    def step(self, text: str) -> tuple[str, bool]:
        return "no", True


class Library:
    def reset(self, seed: int) -> str:
        return "find it"

    def search(self, query: str) -> str:
        """Search the library.

        Args:
            query: Words to search for.
        """
        return query


class Nothing:
    def begin(self) -> str:
        return "guess"

    def _hidden(self) -> None:
        pass


class Quiz:
    def reset(self, qestion: str, seed: int, hints: int = 2) -> str:
        return qestion

    def step(self, text: str) -> tuple[str, bool]:
        return "no", True
