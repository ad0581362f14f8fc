"""Operations and memory by formula."""
