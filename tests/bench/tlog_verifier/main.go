// Checks a log in a folder (checkpoint, tile/...) by Go's own golang.org/x/mod/sumdb: the signature of the checkpoint, the
// tiles against its root, and a proof of every entry. Usage: go run main.go FOLDER VERIFIER-KEY
package main

import (
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// folder reads tiles of height 8. Its paths lack the height, which tlog.Tile has in front of the level.
type folder string

func (f folder) Height() int { return 8 }

func (f folder) SaveTiles([]tlog.Tile, [][]byte) {}

func (f folder) ReadTiles(tiles []tlog.Tile) ([][]byte, error) {
	var found [][]byte
	for _, tile := range tiles {
		body, err := os.ReadFile(filepath.Join(string(f), "tile", strings.TrimPrefix(tile.Path(), "tile/8/")))
		if err != nil {
			return nil, err
		}
		found = append(found, body)
	}
	return found, nil
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	tiles := folder(os.Args[1])
	verifier, err := note.NewVerifier(os.Args[2])
	check(err)
	signed, err := os.ReadFile(filepath.Join(string(tiles), "checkpoint"))
	check(err)
	opened, err := note.Open(signed, note.VerifierList(verifier))
	check(err)
	lines := strings.Split(opened.Text, "\n")
	size, err := strconv.ParseInt(lines[1], 10, 64)
	check(err)
	root, err := tlog.ParseHash(lines[2])
	check(err)
	tree := tlog.Tree{N: size, Hash: root}
	reader := tlog.TileHashReader(tree, tiles)
	entries := entriesOf(tiles, size)
	for index, entry := range entries {
		proof, err := tlog.ProveRecord(size, int64(index), reader)
		check(err)
		check(tlog.CheckRecord(proof, size, root, int64(index), tlog.RecordHash(entry)))
	}
	for older := int64(1); older < size; older += 1 + size/50 {
		was, err := tlog.TreeHash(older, reader)
		check(err)
		proof, err := tlog.ProveTree(size, older, reader)
		check(err)
		check(tlog.CheckTree(proof, size, root, older, was))
	}
	fmt.Printf("%s: %d entries proven\n", lines[0], len(entries))
}

func entriesOf(tiles folder, size int64) [][]byte {
	var entries [][]byte
	for at := int64(0); at < size; at += 256 {
		width := size - at
		if width > 256 {
			width = 256
		}
		path := strings.TrimPrefix(tlog.Tile{H: 8, L: 0, N: at / 256, W: int(width)}.Path(), "tile/8/0/")
		body, err := os.ReadFile(filepath.Join(string(tiles), "tile/entries", path))
		check(err)
		for len(body) > 0 {
			end := 2 + int(binary.BigEndian.Uint16(body))
			entries = append(entries, body[2:end])
			body = body[end:]
		}
	}
	return entries
}
