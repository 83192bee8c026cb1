// Charts are drawn where they are seen: a page may have thousands of them.
import { type ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

const shows = new WeakMap<Element, (seen: boolean) => void>();
const observer = new IntersectionObserver(
  (entries) => entries.forEach(({ target, isIntersecting }) => shows.get(target)?.(isIntersecting)),
  { rootMargin: "300px" },
);

export function Lazy({ children }: { children: ComponentChildren }) {
  const box = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState(false);
  const [height, setHeight] = useState(0);
  useEffect(() => {
    const element = box.current!;
    shows.set(element, (now) => {
      if (!now) setHeight(element.offsetHeight); // so that nothing moves when it goes
      setSeen(now);
    });
    observer.observe(element);
    const print = () => setSeen(true);
    addEventListener("beforeprint", print);
    return () => {
      observer.unobserve(element);
      removeEventListener("beforeprint", print);
    };
  }, []);
  return <div ref={box} class="lazy" style={!seen && height ? { height: `${height}px` } : undefined}>{seen && children}</div>;
}
